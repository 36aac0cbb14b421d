"""How findings are shown: one typed record per fact feeds every format."""
