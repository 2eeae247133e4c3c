"""Norms whose statistics are buffers."""

from torch import nn

#: Their statistics change in training.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

#: Their kernels need weights in the dtype of the running statistics, and those are fp32 (torch 2.13, CPU and CUDA).
NORMS_WITH_STATISTICS = (*BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
