"""Whole-volume segmentation: how large a brain scan can a 3D U-Net learn from on one device?

`decathlon` reads the Medical Segmentation Decathlon layout, `phantoms` writes a small data set in it, `losses` and
`training` make the step that memplan plans.
"""
