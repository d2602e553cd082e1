"""Runs as the command line does them: training, evaluation, scores."""
