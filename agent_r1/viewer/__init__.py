"""A local web page over runs: curves, attempts, conversations and tokens, also while a run trains."""

from agent_r1.viewer.app import create_app
from agent_r1.viewer.catalog import Catalog
from agent_r1.viewer.server import ViewerServer

__all__ = ["Catalog", "ViewerServer", "create_app"]
