"""The bundled vision-language model: a small open_clip CLIP trained on scenes, which needs no download.

`benchmarks/train_tiny_clip.py` makes the weights with the open_clip training stack, and
`benchmarks/results/tiny_clip.json` holds what it measured. The files beside this one are all there is: `model.json`
(architecture and preprocessing in open_clip's own format), `vocabulary.txt` and `weights.safetensors` (float16).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grove_adapters import seeding
from grove_adapters._io import read_json, read_tensors
from grove_adapters.datasets.tiny_clip.tokenizer import WordTokenizer

if TYPE_CHECKING:
    import torch
    from open_clip.model import CLIP
    from PIL import Image

MODEL_NAME = "grove-tiny-scenes"
PRETRAINED = "scenes-v1"

FOLDER = Path(__file__).parent
WEIGHTS = FOLDER / "weights.safetensors"


def tiny_clip_config() -> dict[str, Any]:
    """Architecture and preprocessing: `model_cfg` and `preprocess_cfg` as in an open_clip hub repository."""
    return read_json(FOLDER / "model.json")


def tiny_clip_tokenizer() -> WordTokenizer:
    """The tokenizer with the bundled vocabulary."""
    words = (FOLDER / "vocabulary.txt").read_text(encoding="utf-8").split()
    return WordTokenizer(words, tiny_clip_config()["model_cfg"]["text_cfg"]["context_length"])


def untrained_tiny_clip(seed: int = 0) -> CLIP:
    """open_clip's own `CLIP` in the bundled architecture with seeded random weights: where training starts."""
    from open_clip.model import CLIP

    with seeding.local(seed):
        return CLIP(**tiny_clip_config()["model_cfg"])


def load_tiny_clip(weights: Path = WEIGHTS) -> tuple[CLIP, Callable[[Image.Image], torch.Tensor], WordTokenizer]:
    """Loads the bundled model.

    Args:
        weights: The bundled file, or another one of the same architecture.

    Returns:
        The model (CPU, evaluation mode, float32), its preprocessing from a Pillow image to a (3, 64, 64) tensor, and
        its tokenizer.
    """
    from open_clip.transform import PreprocessCfg, image_transform_v2

    model = untrained_tiny_clip()
    tensors, _ = read_tensors(weights)
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    preprocess = image_transform_v2(PreprocessCfg(**tiny_clip_config()["preprocess_cfg"]), is_train=False)
    return model.eval(), preprocess, tiny_clip_tokenizer()
