"""How tiny-base, the model committed beside TinyWiki, is made. It reads well and plans badly.

python -m research.tiny_base            remake it (minutes, one thread, the same files every time)
"""
