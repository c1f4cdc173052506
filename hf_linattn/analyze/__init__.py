"""How low-rank a checkpoint's attention is, and which layers to convert with what."""

from .analysis import Analysis, Check, analyze
from .config import CANDIDATES, DECODER_CANDIDATES, AnalyzeConfig
from .suggest import Suggestion, suggest

__all__ = ["CANDIDATES", "DECODER_CANDIDATES", "Analysis", "AnalyzeConfig", "Check", "Suggestion", "analyze", "suggest"]
