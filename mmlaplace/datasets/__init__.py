"""Small real data sets for the quickstart, in ImageNet and COCO layout."""
from .digits import (
                     CLASSES,
                     split_digits,
                     write_classification_set,
                     write_detection_set,
)

__all__ = [
    'CLASSES', 'split_digits', 'write_classification_set',
    'write_detection_set'
]
