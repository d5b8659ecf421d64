"""From photographs of skin lesions to a deployed detector.

`isic` reads the ISIC archive's layout, `phantoms` writes a small data set in it, `preparing` feeds batches, `training`
trains under a budget, `detector` classifies photographs with what was exported and knows nothing of the rest.
"""
