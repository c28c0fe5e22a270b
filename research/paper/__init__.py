"""The paper's comparison in miniature: its methods and ablations as training runs, its tables made of them."""
