"""Which layout to choose: the search, its reasons, the config that the engine runs, and the report."""

from .search import Candidate, Plan, Request, make_plan

__all__ = ["Candidate", "Plan", "Request", "make_plan"]
