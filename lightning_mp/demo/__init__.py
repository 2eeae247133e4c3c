"""The main job: a small language model trained on real text with this pack, end to end.

``lightning-mp demo`` runs it; :mod:`lightning_mp.demo.model` and :mod:`lightning_mp.demo.module` are a starting point
for an own model.
"""
