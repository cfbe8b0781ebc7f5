"""The training module: the loop (``loop.py``) and what it is made of."""
