"""A local web page that shows runs: their curves, attempts, conversations and tokens, also during training."""

from agent_r1.viewer.app import create_app
from agent_r1.viewer.catalog import Catalog
from agent_r1.viewer.server import ViewerServer

__all__ = ["Catalog", "ViewerServer", "create_app"]
