"""Export a run: write its model, adapter, trajectories or metrics in the formats of other tools."""

from agent_r1.export.config import ExportConfig, ExportFormat
from agent_r1.export.run import ExportReport, export_run

__all__ = ["ExportConfig", "ExportFormat", "ExportReport", "export_run"]
