"""How credit is assigned: one small part per estimator, over the functions of the algebra."""
