"""Load, adapt, score and save models; the DeepSpeed wrapper SFT and RL share."""
