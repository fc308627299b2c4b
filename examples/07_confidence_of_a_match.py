"""How sure is a match? Its probability, "none of these", and the set of answers that holds a true one 9 times in 10.

python examples/07_confidence_of_a_match.py --store grove-demo/store
python examples/07_confidence_of_a_match.py --smoke
"""

from __future__ import annotations

import argparse

import grove_adapters as ga
from grove_adapters.calibration import conformalise, recalibrate, with_confidence_none
from grove_adapters.datasets.synthetic import make_pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="grove-demo/store", help="an embedding store with splits train and test")
    parser.add_argument("--adapter", default="deterministic", help="whose posteriors are searched")
    parser.add_argument("--smoke", action="store_true", help="use a toy world instead of a store")
    arguments = parser.parse_args()

    if arguments.smoke:
        train, test = make_pairs(900, dim=64).pairs.split(1 / 3)
    else:
        store = ga.EmbeddingStore.open(arguments.store)
        train, test = store.pairs("train"), store.pairs("test")
    adapter = ga.create_adapter(arguments.adapter).fit(train, seed=0)

    # One half of the test pairs fits the maps, the other is asked: what a map was fitted on says nothing about it.
    held_out, asked = (
        {"images": adapter.predict(part.images), "texts": adapter.predict(part.texts), "links": part.links}
        for part in test.split(0.5, seed=0)
    )
    temperature = ga.tasks.fit_temperature(**held_out)
    search = {"temperature": temperature, "marginal": "empirical", "k": (1, 200)}
    seen, new = (ga.tasks.retrieve(**half, **search) for half in (held_out, asked))
    print(f"temperature {temperature:.1f}; {new.correct.mean():.1%} of {len(new)} first answers are right")

    # Largest probability, entropy, margin, KL to the marginal, hubness … in one calibrated probability.
    sure = recalibrate(seen).apply(new, uncertainty=True)
    for name, result in (("softmax", new), ("recalibrated", sure)):
        report = ga.calibrate(result)
        print(f"{name}: ECE {report.scores['ece']}, AUROC of its uncertainty {report.scores['auroc']}")

    # The same, fitted on galleries from which the answers were taken away.
    presence = recalibrate(ga.tasks.retrieve_absent(**held_out, **search))
    none = with_confidence_none(sure, presence, absent_share=0.1).detail["confidence_none"]
    right, wrong = (none[new.correct == answer].mean() for answer in (1, 0))
    print(f"chance of none of these: {right:.1%} where the first answer is right, {wrong:.1%} where it is wrong")

    sets = conformalise(seen, alpha=0.1, score="adaptive").sets(new)
    print(f"sets of {sets.sizes.mean():.1f} answers on average hold a true one in {sets.coverage:.1%} of queries")


if __name__ == "__main__":
    main()
