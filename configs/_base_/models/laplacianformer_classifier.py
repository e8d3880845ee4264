# A size of `laplacianformer/` gives the backbone and `in_channels`.
model = dict(
    type='ImageClassifier',
    neck=dict(type='GlobalAveragePooling'),
    head=dict(
        type='LinearClsHead',
        num_classes=1000,
        # Smoothing, mixup and cutmix of DeiT (arXiv 2012.12877), which PVT
        # and SOFT train with.
        loss=dict(
            type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
        # Labels are mixed in training, so accuracy means nothing there.
        cal_acc=False),
    train_cfg=dict(augments=[
        dict(type='Mixup', alpha=0.8),
        dict(type='CutMix', alpha=1.0)
    ]))
