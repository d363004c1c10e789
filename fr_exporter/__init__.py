"""Which ranks made a hung PyTorch job wait, from its flight-recorder dumps."""

from fr_exporter._version import __version__
from fr_exporter.attribution import CollectiveAnalyzer, FRAnalysisResult, analyze_dumps
from fr_exporter.diagnosis import AttributionState, Diagnosis

__all__ = [
    "AttributionState",
    "CollectiveAnalyzer",
    "Diagnosis",
    "FRAnalysisResult",
    "__version__",
    "analyze_dumps",
]
