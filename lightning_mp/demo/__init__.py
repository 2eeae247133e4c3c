"""The main job: a small language model trained on real text with this pack, end to end.

``lightning-mp demo`` runs it. Start reading at ``assemble`` in :mod:`lightning_mp.demo.run`, where the Trainer gets its
plugin, strategy and callbacks. The model and the text are those of :mod:`lightning_mp.language_model`.
"""
