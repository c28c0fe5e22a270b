from chat_servers import serve  # noqa: F401
from learning_fixtures import make  # noqa: F401
