_base_ = '../classification/laplacianformer-tiny_8xb128_in1k.py'

model = dict(backbone=dict(landmark_source='queries_and_keys'))
