"""Precision policies: ordered rules about modules and operations, and how they are carried out."""
