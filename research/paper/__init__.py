"""The paper's comparison in miniature: its methods and ablations as training runs, and its tables made from them."""
