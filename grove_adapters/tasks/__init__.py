"""What people do with posteriors: each task reads them and returns a `TaskResult`, one row a query."""

from grove_adapters.tasks.absence import retrieve_absent
from grove_adapters.tasks.base import TaskResult
from grove_adapters.tasks.index import Neighbours, search
from grove_adapters.tasks.retrieval import retrieve
from grove_adapters.tasks.sampled import search_sampled
from grove_adapters.tasks.temperature import fit_temperature
from grove_adapters.tasks.truth_files import read_matches
from grove_adapters.tasks.vqa import Questions, answer, soft_accuracy
from grove_adapters.tasks.zero_shot import class_mixtures, classify

__all__ = [
    "Neighbours",
    "Questions",
    "TaskResult",
    "answer",
    "class_mixtures",
    "classify",
    "fit_temperature",
    "read_matches",
    "retrieve",
    "retrieve_absent",
    "search",
    "search_sampled",
    "soft_accuracy",
]
