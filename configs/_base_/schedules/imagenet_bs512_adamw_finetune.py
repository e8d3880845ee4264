# Fine-tuning of ConvNeXt at 384 (arXiv 2201.03545, appendix A): 30 epochs,
# AdamW, lr 5e-5 at batch 512, weight decay 1e-8, cosine without warm-up,
# layer-wise decay, EMA, neither mixup nor cutmix.
optim_wrapper = dict(
    optimizer=dict(type='AdamW', lr=5e-5, weight_decay=1e-8),
    constructor='LearningRateDecayOptimWrapperConstructor',
    paramwise_cfg=dict(
        norm_decay_mult=0.0, bias_decay_mult=0.0, flat_decay_mult=0.0),
    # As in training from scratch.
    clip_grad=dict(max_norm=1.0))
param_scheduler = [dict(type='CosineAnnealingLR', by_epoch=True)]
train_cfg = dict(by_epoch=True, max_epochs=30, val_interval=1)
val_cfg = dict()
test_cfg = dict()
custom_hooks = [dict(type='EMAHook', momentum=1e-4, priority='ABOVE_NORMAL')]
auto_scale_lr = dict(base_batch_size=512)
