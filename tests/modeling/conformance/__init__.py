"""One file per promise of converted models, tested of every row of the registries (`cases`).

A new method, feature map, projection or architecture is tested by being registered. The functions `check_...` take a
model or a layer, so that other tests can ask the same of their own.
"""
