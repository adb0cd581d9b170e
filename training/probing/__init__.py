"""Evaluates frozen features: by classifiers that are cheap to fit, and for signs of a collapse."""
