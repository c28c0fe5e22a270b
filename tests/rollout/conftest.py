from chat_servers import serve  # noqa: F401
from engine_fixtures import tiny_model  # noqa: F401
