"""From a pretrained checkpoint to the same model with linear attention."""
