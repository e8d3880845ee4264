_base_ = '../classification/laplacianformer-tiny_8xb128_in1k.py'

model = dict(backbone=dict(scale=1.0))
