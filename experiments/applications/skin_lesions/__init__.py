"""Skin lesions: a classifier and a segmentation of photographs, trained within a budget."""
