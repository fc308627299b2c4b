"""Scenes: a rendered world whose ambiguity is known.

world -> describe (the exact meaning of a caption) -> evidence (what a degraded picture still shows)
-> captions, render, questions -> dataset (`Scenes`: pictures, captions, links, positives and true ambiguities).
"""

from grove_adapters.datasets.scenes.captions import Caption, caption_chain, phrase, vocabulary
from grove_adapters.datasets.scenes.dataset import Scenes
from grove_adapters.datasets.scenes.describe import (
    Description,
    Part,
    Relation,
    SceneIndex,
    describes,
    log_share,
    matches,
)
from grove_adapters.datasets.scenes.evidence import Evidence, compatible, evidence, log_share_shown
from grove_adapters.datasets.scenes.questions import Question, ask
from grove_adapters.datasets.scenes.render import contact_sheet, render, render_all, render_image
from grove_adapters.datasets.scenes.world import Degradation, Scene, ScenePrior, SceneTable, Thing

__all__ = [
    "Caption",
    "Degradation",
    "Description",
    "Evidence",
    "Part",
    "Question",
    "Relation",
    "Scene",
    "SceneIndex",
    "ScenePrior",
    "SceneTable",
    "Scenes",
    "Thing",
    "ask",
    "caption_chain",
    "compatible",
    "contact_sheet",
    "describes",
    "evidence",
    "log_share",
    "log_share_shown",
    "matches",
    "phrase",
    "render",
    "render_all",
    "render_image",
    "vocabulary",
]
