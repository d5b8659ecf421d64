"""Skin lesions: from photographs to a classifier and a segmentation, both trained within a budget."""
