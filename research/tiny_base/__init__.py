"""The making of tiny-base, the model that is committed beside TinyWiki. It reads well and plans badly.

``python -m research.tiny_base`` makes it again: minutes on one thread, with the same files each time.
"""
