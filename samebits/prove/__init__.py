"""A run proves itself: parts of it are trained again under changed circumstances, before its receipt is written."""
