_base_ = './registry.py'

# A backbone for trials and quick tests: the published layout, a few minutes
# to train on two CPU cores. The published sizes are names: arch='tiny'.
backbone = dict(
    type='mmlaplace.LaplacianFormer',
    arch=dict(
        embed_dims=[32, 64, 128, 192],
        depths=[1, 1, 2, 1],
        num_heads=[1, 2, 4, 6]),
    stem_channels=16,
    drop_path_rate=0.0)
embed_dims = backbone['arch']['embed_dims']
