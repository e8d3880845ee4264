# The augmentation of DeiT (arXiv 2012.12877), which PVT and SOFT train with:
# RandAugment of magnitude 9 and random erasing of probability 0.25.
_base_ = 'mmpretrain::_base_/datasets/imagenet_bs64_swin_224.py'

train_dataloader = dict(batch_size=128)
