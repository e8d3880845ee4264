_base_ = './registry.py'

# Drop path of PVT v2 (arXiv 2106.13797) at a like size: B5, 82 M.
backbone = dict(
    type='mmlaplace.LaplacianFormer', arch='huge', drop_path_rate=0.3)
embed_dims = [64, 128, 352, 512]
# No weights are published: this is what training the ImageNet-1k config of
# this size leaves, taken up by fine-tuning and detection.
checkpoint = 'work_dirs/laplacianformer-huge_8xb128_in1k/epoch_300.pth'
