import math

import pytest
import torch

from grove_adapters.adapters.base import FitReport, FitRun
from grove_adapters.adapters.loop import LoopConfig, minimise
from grove_adapters.errors import ConfigError, NumericalError

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
