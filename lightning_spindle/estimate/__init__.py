"""Estimating what operators and messages cost on the devices at hand (paper, section 3.2).

``samples`` and ``problem`` are pure; ``measure`` and ``links`` need torch, so they are not
imported here.
"""
