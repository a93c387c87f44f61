import torch
from sklearn.datasets import load_digits
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from zerolab import MemoryCallback

images, labels = load_digits(return_X_y=True)
data = [{"pixel_values": torch.tensor(x).float().view(1, 8, 8), "labels": int(y)} for x, y in zip(images, labels)]
model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=2, num_channels=1, hidden_size=48, num_labels=10))
args = TrainingArguments("own_run", max_steps=20, logging_steps=1, report_to="none", save_strategy="no")
trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=data[:100], callbacks=[MemoryCallback()])
trainer.train()
trainer.evaluate()
