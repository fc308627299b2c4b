"""What people do with posteriors: each task reads them and returns a `TaskResult`, one row a query."""

from grove_adapters.tasks.base import TaskResult

__all__ = ["TaskResult"]
