"""The account: bytes per state and traffic per step, predicted from layout and placement, measured beside it."""

from .records import LedgerRow, OptimizerRecord, TrafficRow, UnitRecord
from .report import Ledger
from .states import predict_states
from .traffic import predict_traffic

__all__ = ["Ledger", "LedgerRow", "OptimizerRecord", "TrafficRow", "UnitRecord", "predict_states", "predict_traffic"]
