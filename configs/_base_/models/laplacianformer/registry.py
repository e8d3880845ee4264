# Importing the registry lets torch.load read the checkpoints that mmengine
# saves, also in an inferencer that loads them before it builds the model.
custom_imports = dict(
    imports=['mmlaplace.registry'], allow_failed_imports=False)
