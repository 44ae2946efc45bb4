"""Where generator and learner run: inline, or as Ray actors."""
