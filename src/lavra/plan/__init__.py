"""Recipe + machine + budget -> decisions and predictions. Closed forms; trains nothing."""
