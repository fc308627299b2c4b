"""Zero-shot classes and answers to questions with the bundled model, and whether one way is really better than another.

python examples/08_classes_and_questions.py
python examples/08_classes_and_questions.py --smoke
"""

from __future__ import annotations

import argparse

import grove_adapters as ga
from grove_adapters.calibration import compare
from grove_adapters.datasets.scenes import Scenes
from grove_adapters.datasets.scenes.world import BACKGROUNDS
from grove_adapters.datasets.tiny_clip import MODEL_NAME, load_tiny_clip
from grove_adapters.extract import OpenCLIPExtractor

TEMPLATES = ("some shapes on a {} background", "a picture of shapes against a {} background", "only a star on {}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", type=int, default=500, help="how many pictures are drawn")
    parser.add_argument("--smoke", action="store_true", help="40 pictures")
    arguments = parser.parse_args()

    model, preprocess, tokenizer = load_tiny_clip()
    extractor = OpenCLIPExtractor(model, preprocess=preprocess, tokenizer=tokenizer, name=MODEL_NAME)
    scenes = Scenes.generate(40 if arguments.smoke else arguments.scenes, seed=1)
    pictures = extractor.embed_images([scenes.image(row) for row in range(len(scenes))])
    images = ga.Embeddings(pictures, scenes.image_ids, modality="image", source=extractor.source)

    def texts(words: list[str]) -> ga.Embeddings:
        return ga.Embeddings(extractor.embed_texts(words), words, modality="text", source=extractor.source)

    # Three prompts a class, read as one distribution; then the first template alone.
    prompts = texts([template.format(colour) for colour in BACKGROUNDS for template in TEMPLATES])
    adapter = ga.create_adapter("deterministic").fit(ga.Pairs(images, prompts, [(0, 0)]))
    seen, classes = adapter.predict(images), [colour for colour in BACKGROUNDS for _ in TEMPLATES]
    truth = [scenes.scene(row).background for row in range(len(scenes))]
    ensemble = ga.tasks.classify(seen, adapter.predict(prompts), prompt_classes=classes, labels=truth)
    first = adapter.predict(prompts.take(range(0, len(prompts), len(TEMPLATES))))
    single = ga.tasks.classify(seen, first, prompt_classes=BACKGROUNDS, labels=truth)
    gain = compare(ensemble, single).differences["recall"]
    print(f"background colour: {ensemble.correct.mean():.1%} with {len(TEMPLATES)} prompts a class, {gain} over one")

    # "What colour is the shape at the top?" becomes "a red shape at the top": the model was trained on statements.
    asked = [question for question in scenes.questions(7) if question.kind == "colour"]
    questions = ga.tasks.Questions.of(
        asked, template=lambda question, said: f"a {said} {question.text.partition(' the ')[2].rstrip('?')}"
    )
    answers = ga.tasks.answer(seen, adapter.predict(texts(list(questions.texts))), questions=questions)
    report = ga.calibrate(answers)
    print(f"{len(questions)} questions: soft accuracy {report.scores['recall']}, ECE {report.scores['ece']}")
    print("of the surer half:", report.accuracy_at_coverage[0.5], f"({report.levels_in_words})")


if __name__ == "__main__":
    main()
