"""Judges: is what was planned what was written? They share no code with what plans and writes.

May import the types of a module and of a program; nothing that decides or carries out.
"""
