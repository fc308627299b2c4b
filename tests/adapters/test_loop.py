import contextlib
import dataclasses
import math

import pytest
import torch

from grove_adapters.adapters.base import FitReport, FitRun
from grove_adapters.adapters.checkpoint import Checkpoint
from grove_adapters.adapters.loop import LoopConfig, hold_out, minimise
from grove_adapters.datasets.synthetic import make_pairs
from grove_adapters.errors import ConfigError, NumericalError, StoreError

TARGETS = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))


def make_run(seed=0):
    report = FitReport(adapter="test", seed=seed, n_pairs=200)
    return FitRun(seed=seed, device=torch.device("cpu"), progress=False, report=report)


class Centre(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.point = torch.nn.Parameter(torch.zeros(3))
        self.seen = []

    def objective(self, rows):
        self.seen.append(rows)
        error = (TARGETS[rows] - self.point).square().mean()
        return {"loss": error, "twice": 2 * error}


def test_it_finds_the_minimum_and_reports_each_epoch():
    model, run = Centre(), make_run()
    minimise(model.objective, model, 200, LoopConfig(epochs=200, batch_size=50, learning_rate=0.05), run)
    torch.testing.assert_close(model.point.detach(), TARGETS.mean(0), atol=0.05, rtol=0)
    assert (run.report.epochs, run.report.steps, run.report.stopped) == (200, 800, "all epochs")
    assert run.report.chosen_by == "last epoch"
    last = run.report.history[-1]
    assert last["twice"] == pytest.approx(2 * last["loss"])


def test_every_epoch_sees_every_row_once_in_another_order():
    model = Centre()
    minimise(model.objective, model, 200, LoopConfig(epochs=2, batch_size=64), make_run())
    one, two = torch.cat(model.seen[:4]), torch.cat(model.seen[4:])
    assert one.sort().values.tolist() == two.sort().values.tolist() == list(range(200))
    assert not torch.equal(one, two)


def test_equal_seeds_give_equal_weights():
    points = []
    for seed in (0, 0, 1):
        model = Centre()
        minimise(model.objective, model, 200, LoopConfig(epochs=2, batch_size=7), make_run(seed))
        points.append(model.point.detach())
    assert torch.equal(points[0], points[1])
    assert not torch.equal(points[0], points[2])


def test_validation_chooses_the_weights_and_stops():
    model, run = Centre(), make_run()
    values = iter([3.0, 1.0, 2.0, 2.0, 2.0, 0.0])
    points = []

    def validate():
        points.append(model.point.detach().clone())
        return next(values)

    minimise(model.objective, model, 200, LoopConfig(epochs=50, patience=3), run, validate=validate)
    assert (run.report.epochs, run.report.best_epoch, run.report.stopped) == (5, 2, "no improvement")
    assert run.report.chosen_by == "validation"
    assert torch.equal(model.point, points[1])
    assert [entry["validation"] for entry in run.report.history] == [3, 1, 2, 2, 2]


def test_large_gradients_are_cut_and_counted():
    model, run = Centre(), make_run()
    minimise(lambda rows: {"loss": 1e6 * model.point.sum()}, model, 10, LoopConfig(epochs=3), run)
    assert run.report.clipped_steps == 3


def test_gradients_whose_squares_overflow_are_cut_too():
    model, run = Centre(), make_run()
    minimise(lambda rows: {"loss": 1e25 * (model.point - 1).sum()}, model, 200, LoopConfig(epochs=1), run)
    assert run.report.clipped_steps == run.report.steps == 1
    assert float(model.point.grad.norm()) == pytest.approx(LoopConfig().clip_norm)
    assert bool((model.point < 0).all())


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (lambda model: {"loss": model.point.sum() * math.nan}, "finite loss, got nan at epoch 1, step 1"),
        (lambda model: {"loss": model.point.sum(), "kl": torch.tensor(math.inf)}, "finite kl, got inf"),
        (lambda model: {"loss": model.point.sqrt().sum()}, "finite gradients"),
    ],
)
def test_divergence_names_epoch_step_and_term(bad, words):
    model = Centre()
    with pytest.raises(NumericalError, match=words):
        minimise(lambda rows: bad(model), model, 10, LoopConfig(epochs=1), make_run())


def test_a_validation_value_that_is_not_finite_is_refused():
    model = Centre()
    with pytest.raises(NumericalError, match="validation value"):
        minimise(model.objective, model, 200, LoopConfig(epochs=1), make_run(), validate=lambda: math.nan)


def test_sparse_parameters_move_only_in_their_rows():
    table = torch.nn.Embedding(200, 3, sparse=True)
    before = table.weight.detach().clone()
    module = torch.nn.Module()
    module.table = table

    def objective(rows):
        return {"loss": table(rows % 50).square().sum()}

    minimise(objective, module, 200, LoopConfig(epochs=1), make_run(), others=[torch.optim.SparseAdam([table.weight])])
    moved = (table.weight != before).any(1)
    assert bool(moved[:50].all())
    assert not bool(moved[50:].any())


@pytest.mark.parametrize(
    "settings", [{"epochs": 0}, {"batch_size": 0}, {"learning_rate": 0.0}, {"validation_share": 1.0}, {"patience": 0}]
)
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        LoopConfig(**settings)


class Interrupted(Exception):
    """Stands for a machine that goes away."""


@pytest.mark.parametrize("stop_after", [1, 3, 4, 7])
@pytest.mark.parametrize("validated", [True, False])
def test_an_interrupted_run_ends_like_an_undisturbed_one(tmp_path, stop_after, validated):
    settings = LoopConfig(epochs=8, batch_size=64, learning_rate=0.1, patience=3)

    def run_once(checkpoint, die_at=None):
        model = torch.nn.Module()
        model.table = torch.nn.Embedding.from_pretrained(torch.zeros(200, 3), freeze=False, sparse=True)
        model.noisy = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5))
        torch.nn.init.eye_(model.noisy[0].weight)
        torch.nn.init.zeros_(model.noisy[0].bias)
        run = dataclasses.replace(make_run(), checkpoint=checkpoint)
        calls = 0

        def objective(rows):
            nonlocal calls
            calls += 1
            if die_at is not None and calls > 4 * die_at + 2:
                raise Interrupted
            return {"loss": (model.noisy(TARGETS[rows]) - model.table(rows)).square().mean()}

        def validate():
            return abs(run.report.epochs - 5) + float(model.noisy[0].bias.norm())

        sparse = torch.optim.SparseAdam([model.table.weight])
        with contextlib.suppress(Interrupted):
            minimise(objective, model, 200, settings, run, others=[sparse], validate=validate if validated else None)
        return model.state_dict(), run.report

    weights, report = run_once(None)
    checkpoint = Checkpoint(tmp_path / "fit", {"seed": 0})
    run_once(checkpoint, die_at=stop_after)
    assert [path.name for path in checkpoint.folder.iterdir()] == ["fit_state.safetensors"]
    for _ in range(2):  # the second time there is nothing left to do
        resumed, again = run_once(checkpoint)
        assert again == report
        for name, tensor in weights.items():
            assert torch.equal(resumed[name], tensor), name


def test_a_checkpoint_of_another_fit_is_refused_and_only_states_are_removed(tmp_path):
    model = Centre()
    one = Checkpoint(tmp_path / "fit", {"seed": 0, "config": {"epochs": 2}})
    minimise(model.objective, model, 200, LoopConfig(epochs=2), dataclasses.replace(make_run(), checkpoint=one))
    one.part("inner").write({"x": torch.zeros(1)}, {})
    other = dataclasses.replace(one, facts={"seed": 1, "config": {"epochs": 2}})
    with pytest.raises(StoreError, match="another seed"):
        minimise(model.objective, model, 200, LoopConfig(epochs=2), dataclasses.replace(make_run(), checkpoint=other))
    (tmp_path / "fit" / "thesis.txt").write_text("years of work")
    one.remove()
    assert [path.name for path in (tmp_path / "fit").iterdir()] == ["thesis.txt"]


def test_a_fit_goes_on_from_its_checkpoint_and_removes_it(tmp_path):
    from grove_adapters.adapters.base import Adapter

    class Toy(Adapter):
        name = "toy"
        config_class = LoopConfig
        dies = False

        def _fit(self, pairs, validation, run):
            model = Centre()

            def objective(rows):
                if self.dies and run.report.epochs == 2:
                    raise Interrupted
                return model.objective(rows)

            minimise(objective, model, 200, self.config, run)
            return model

        def _predict(self, batch):
            raise NotImplementedError

    pairs = make_pairs(200, dim=3).pairs
    toy = Toy(epochs=4)
    toy.dies = True
    with pytest.raises(Interrupted):
        toy.fit(pairs, seed=5, checkpoint=tmp_path / "fit")
    with pytest.raises(StoreError, match="another seed"):
        Toy(epochs=4).fit(pairs, seed=6, checkpoint=tmp_path / "fit")
    with pytest.raises(StoreError, match="another data"):
        Toy(epochs=4).fit(pairs.take_images(range(199)), seed=5, checkpoint=tmp_path / "fit")
    resumed, whole = Toy(epochs=4).fit(pairs, seed=5, checkpoint=tmp_path / "fit"), Toy(epochs=4).fit(pairs, seed=5)
    assert torch.equal(resumed.module_.point, whole.module_.point)
    assert resumed.fit_report_.history == whole.fit_report_.history
    assert not (tmp_path / "fit").exists()


def test_parts_of_a_run_have_seeds_and_checkpoints_of_their_own(tmp_path):
    run = dataclasses.replace(make_run(), checkpoint=Checkpoint(tmp_path, {}))
    one, two = run.part("fold-0"), run.part("fold-1")
    assert len({run.seed, one.seed, two.seed}) == 3
    assert one.checkpoint.folder == tmp_path / "fold-0"
    assert make_run().part("fold-0").checkpoint is None
    assert one.report is not run.report


def test_held_out_images_take_all_their_texts_along():
    pairs = make_pairs(100, dim=4).pairs
    run = make_run()
    fit, validation = hold_out(pairs, None, 0.1, run)
    assert (len(fit), len(validation), run.report.n_validation) == (90, 10, 10)
    assert not set(fit.texts.ids) & set(validation.texts.ids)
    assert hold_out(pairs, validation, 0.1, run) == (pairs, validation)
    assert hold_out(pairs.take_images(range(19)), None, 0.1, run)[1] is None
    assert hold_out(pairs, None, 0.0, run) == (pairs, None)
    assert run.report.n_validation == 0


def test_random_numbers_of_a_loop_are_its_own():
    before = torch.get_rng_state()
    model = Centre()
    minimise(lambda rows: {"loss": (model.point * torch.randn(3)).sum()}, model, 10, LoopConfig(epochs=1), make_run())
    assert torch.equal(torch.get_rng_state(), before)
