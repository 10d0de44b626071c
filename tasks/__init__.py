"""Contrastive tasks that share one text encoder: a small Multitask-CLIP."""

from tasks.contrastive import AudioText, ContrastiveTask, ImageText, MotionText
from tasks.encoders import FrameEncoder, ImageEncoder, TextEncoder
from tasks.optimizers import AdamWSchedule

__all__ = [
    "AdamWSchedule",
    "AudioText",
    "ContrastiveTask",
    "FrameEncoder",
    "ImageEncoder",
    "ImageText",
    "MotionText",
    "TextEncoder",
]
