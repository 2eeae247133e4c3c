"""The learning rate over tokens: the parts of ``TokenLearningRate``."""
