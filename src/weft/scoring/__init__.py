"""How good the cost model is: its predictions of other people's runs beside what they measured."""
