"""Whole-volume segmentation: how large a brain scan can a 3D U-Net learn from on one device?

`decathlon` reads data sets in the layout of the Medical Segmentation Decathlon, `phantoms` writes a
small one, and `losses` and `training` build the step that memplan plans.
"""
