_base_ = './registry.py'

# Drop path of PVT v2 (arXiv 2106.13797) at a like size: B1, 13 M.
backbone = dict(
    type='mmlaplace.LaplacianFormer', arch='tiny', drop_path_rate=0.1)
embed_dims = [64, 128, 320, 512]
# No weights are published: this is what training the ImageNet-1k config of
# this size leaves, taken up by fine-tuning and detection.
checkpoint = 'work_dirs/laplacianformer-tiny_8xb128_in1k/epoch_300.pth'
